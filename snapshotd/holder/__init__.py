"""Device memory that belongs to no running process: kept as descriptors, and copied from the GPU while a rank moves."""
