"""Small policies that train on a CPU in minutes."""
