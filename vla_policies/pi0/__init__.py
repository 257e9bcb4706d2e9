"""pi0 and pi0.5."""
