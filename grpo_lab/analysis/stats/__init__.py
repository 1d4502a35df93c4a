"""Pure statistics: numbers in, intervals, p-values and power out. Nothing here knows what a sweep is."""
