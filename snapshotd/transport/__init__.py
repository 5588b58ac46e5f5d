"""The data connections of a move: one for the image, one for device memory."""
