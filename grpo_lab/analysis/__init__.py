"""From run folders to figures, tables and a verdict, without torch and without MLflow.

`load` reads a sweep or its saved data, `outcome` turns runs into final values, `stats` holds the two intervals,
`table` and `verdict` say them in numbers and words, `curves` and `effects` draw them, `build` makes all of it.
"""
