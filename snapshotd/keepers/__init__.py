"""The keepers that connect to this daemon, and the ranks that they keep."""
