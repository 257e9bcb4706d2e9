"""Data sets in LeRobot's format (v2.1 and v3) as demonstrations, read from a local folder without LeRobot."""
