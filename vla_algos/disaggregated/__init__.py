"""Processes that only act or only learn: roles, exchange of weights, the schedule of batches (``ppo_async.py``)."""
