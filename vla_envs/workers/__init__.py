"""Worker processes that run simulators, and the memory they share with the environment."""
