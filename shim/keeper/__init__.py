"""The keeper: the process that the launcher knows as the rank."""
