"""What stands between observations and networks, and between networks and actions."""
