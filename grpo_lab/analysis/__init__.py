"""From runs to figures, tables and a verdict, without torch.

Imports go one way: `table_rows`, then `stats` and `sources`, then `final_values` (with `tracks`, `caveats` and
`metric_names`), then `effects`, `divergence` and `scaling`, then `figures`, `report`, and last `build`, the entry of
the commands.
"""
