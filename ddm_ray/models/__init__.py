"""Networks: no training, no storage."""
