"""Storms of faults. ``make test-storm`` runs them whole; tests of other tiers run a small part of each."""
