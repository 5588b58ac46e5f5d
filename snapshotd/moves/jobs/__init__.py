"""Suspends and resumes whole jobs: the coordinator's record, the images of suspended ranks (migrator/job_protocol.py)."""
