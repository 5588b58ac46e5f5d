"""The connections of a moving rank, on every node that has an end of one."""
