"""Effects of tricks: contrasts of arms paired by seed, the first table, and the verdict on declared predictions."""
