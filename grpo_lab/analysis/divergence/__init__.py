"""Whether training reward and downstream accuracy part: measures of runs, and what choosing by reward costs."""
