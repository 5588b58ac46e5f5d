/* The arithmetic of reductions. Invariant: the same inputs give the same bits on every machine, because blocks are taken
 * in the order of ranks and nothing is vectorised across them. Integers wrap around.
 */
#include "reductions.h"

#include <math.h>
#include <string.h>

size_t element_bytes(ncclDataType_t datatype)
{
	switch (datatype) {
	case ncclInt8:
	case ncclUint8:
	case ncclFloat8e4m3:
	case ncclFloat8e5m2:
		return 1;
	case ncclFloat16:
	case ncclBfloat16:
		return 2;
	case ncclInt32:
	case ncclUint32:
	case ncclFloat32:
		return 4;
	case ncclInt64:
	case ncclUint64:
	case ncclFloat64:
		return 8;
	default:
		return 0;
	}
}

bool reducible(ncclDataType_t datatype)
{
	return element_bytes(datatype) != 0 && datatype != ncclFloat8e4m3 && datatype != ncclFloat8e5m2;
}

static float bits_to_float(uint32_t bits)
{
	float value;

	memcpy(&value, &bits, sizeof(value));
	return value;
}

static uint32_t float_to_bits(float value)
{
	uint32_t bits;

	memcpy(&bits, &value, sizeof(bits));
	return bits;
}

static float bfloat16_to_float(uint16_t half)
{
	return bits_to_float((uint32_t)half << 16);
}

static uint16_t float_to_bfloat16(float value)
{
	uint32_t bits = float_to_bits(value);

	if (isnan(value))
		return (uint16_t)(bits >> 16 | 0x40);
	return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16); /* to nearest, ties to even */
}

static float float16_to_float(uint16_t half)
{
	uint32_t sign = (uint32_t)(half & 0x8000) << 16;
	int exponent = half >> 10 & 31;
	uint32_t fraction = half & 0x3ff;
	float value;

	if (exponent == 31)
		return bits_to_float(sign | 0x7f800000u | fraction << 13);
	value = exponent ? ldexpf((float)(fraction | 0x400), exponent - 25) : ldexpf((float)fraction, -24);
	return bits_to_float(float_to_bits(value) | sign);
}

static uint16_t float_to_float16(float value)
{
	uint16_t sign = (uint16_t)(float_to_bits(value) >> 16 & 0x8000);
	float size = fabsf(value);
	int exponent;

	if (isnan(value))
		return sign | 0x7e00;
	if (size >= 65520.0f) /* would round up to 65536, which the type does not have */
		return sign | 0x7c00;
	if (size < 0x1p-14f) /* subnormal; what rounds up to 1024 is the smallest normal number, bits and all */
		return sign | (uint16_t)rintf(ldexpf(size, 24));
	frexpf(size, &exponent); /* size = f × 2^exponent, f in [0.5, 1) */
	return sign | (uint16_t)(((exponent + 13) << 10) + (int)rintf(ldexpf(size, 11 - exponent)));
}

/* `work` is the type computed in, `wide` the one that sum and product wrap around in. */
#define COMBINE(suffix, stored, work, wide, load, store, divide)                                                      \
	static void combine_##suffix(void *destination, const void *const *blocks, int nblocks, size_t count,         \
				     ncclRedOp_t kind)                                                                \
	{                                                                                                             \
		for (size_t i = 0; i < count; i++) {                                                                  \
			work total = load(((const stored *)blocks[0])[i]);                                            \
                                                                                                                      \
			for (int b = 1; b < nblocks; b++) {                                                           \
				work value = load(((const stored *)blocks[b])[i]);                                    \
                                                                                                                      \
				if (kind == ncclProd)                                                                 \
					total = (work)((wide)total * (wide)value);                                    \
				else if (kind == ncclMax)                                                             \
					total = value > total ? value : total;                                        \
				else if (kind == ncclMin)                                                             \
					total = value < total ? value : total;                                        \
				else                                                                                  \
					total = (work)((wide)total + (wide)value);                                    \
			}                                                                                             \
			if (kind == ncclAvg)                                                                          \
				total = divide(total, nblocks);                                                       \
			((stored *)destination)[i] = store(total);                                                    \
		}                                                                                                     \
	}                                                                                                             \
	static void scale_##suffix(void *destination, const void *source, size_t count, const void *scalar)           \
	{                                                                                                             \
		work factor = load(*(const stored *)scalar);                                                          \
                                                                                                                      \
		for (size_t i = 0; i < count; i++)                                                                    \
			((stored *)destination)[i] =                                                                  \
				store((work)((wide)load(((const stored *)source)[i]) * (wide)factor));                \
	}

#define SAME(x) (x)
#define DIVIDE(total, n) ((total) / (n))
/* Division of unsigned 64-bit numbers must not turn n into a signed type. */
#define DIVIDE_U64(total, n) ((total) / (uint64_t)(n))

COMBINE(i8, int8_t, int32_t, uint32_t, SAME, (int8_t), DIVIDE)
COMBINE(u8, uint8_t, uint32_t, uint32_t, SAME, (uint8_t), DIVIDE_U64)
COMBINE(i32, int32_t, int32_t, uint32_t, SAME, SAME, DIVIDE)
COMBINE(u32, uint32_t, uint32_t, uint32_t, SAME, SAME, DIVIDE_U64)
COMBINE(i64, int64_t, int64_t, uint64_t, SAME, SAME, DIVIDE)
COMBINE(u64, uint64_t, uint64_t, uint64_t, SAME, SAME, DIVIDE_U64)
COMBINE(f16, uint16_t, float, float, float16_to_float, float_to_float16, DIVIDE)
COMBINE(bf16, uint16_t, float, float, bfloat16_to_float, float_to_bfloat16, DIVIDE)
COMBINE(f32, float, float, float, SAME, SAME, DIVIDE)
COMBINE(f64, double, double, double, SAME, SAME, DIVIDE)

static const struct {
	void (*combine)(void *, const void *const *, int, size_t, ncclRedOp_t);
	void (*scale)(void *, const void *, size_t, const void *);
} arithmetic[ncclNumTypes] = {
	[ncclInt8] = {combine_i8, scale_i8},      [ncclUint8] = {combine_u8, scale_u8},
	[ncclInt32] = {combine_i32, scale_i32},   [ncclUint32] = {combine_u32, scale_u32},
	[ncclInt64] = {combine_i64, scale_i64},   [ncclUint64] = {combine_u64, scale_u64},
	[ncclFloat16] = {combine_f16, scale_f16}, [ncclBfloat16] = {combine_bf16, scale_bf16},
	[ncclFloat32] = {combine_f32, scale_f32}, [ncclFloat64] = {combine_f64, scale_f64},
};

void reduce_blocks(void *destination, const void *const *blocks, int nblocks, size_t count, ncclDataType_t datatype,
		   ncclRedOp_t kind)
{
	arithmetic[datatype].combine(destination, blocks, nblocks, count, kind);
}

void scale(void *destination, const void *source, size_t count, ncclDataType_t datatype, const struct reduction *reduction)
{
	unsigned char aligned[SCALAR_BYTES] __attribute__((aligned(SCALAR_BYTES)));

	memcpy(aligned, reduction->scalar ? reduction->scalar : reduction->value, element_bytes(datatype));
	arithmetic[datatype].scale(destination, source, count, aligned);
}
