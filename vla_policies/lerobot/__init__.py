"""Checkpoint folders of LeRobot, which policy families with a network of that name read and write."""
