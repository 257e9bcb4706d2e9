"""Flow-matching policies: the steps from noise to actions, and what all of them share."""
