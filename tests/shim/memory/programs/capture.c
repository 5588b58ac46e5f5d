/* The stand-in of the runtime captures nothing. The library only has to see that a capture begins and ends. */
int cudaStreamBeginCapture(void *stream, int mode);
int cudaStreamEndCapture(void *stream, void **graph);

int cudaStreamBeginCapture(void *stream, int mode)
{
	(void)stream;
	(void)mode;
	return 0;
}

int cudaStreamEndCapture(void *stream, void **graph)
{
	(void)stream;
	*graph = 0;
	return 0;
}
