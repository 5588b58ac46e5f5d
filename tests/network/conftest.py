from tests.served import certificates, free_port, serve

__all__ = ["certificates", "free_port", "serve"]
