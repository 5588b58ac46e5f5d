"""CRIU as a child process: sessions over its RPC socket, its log, and its image files."""
