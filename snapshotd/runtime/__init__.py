"""Services that all parts of the daemon use: threads, logs, metrics, fault points, systemd notification."""
