"""Graphics devices and drivers: chosen and checked here, before a simulator is imported."""
