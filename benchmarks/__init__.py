"""One script per question, always a pair; ``make bench`` runs them all."""
