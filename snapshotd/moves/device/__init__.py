"""The device memory of a moving rank."""
