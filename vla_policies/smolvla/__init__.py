"""SmolVLA as a native module that reads and writes LeRobot's checkpoints."""
