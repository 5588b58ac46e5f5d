"""What every part of the daemon uses as a process: threads, logs, metrics, fault points, systemd."""
