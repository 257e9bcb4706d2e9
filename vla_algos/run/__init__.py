"""Everything of a run that is not its algorithm: folder, configuration, checkpoints, logging, launching."""
