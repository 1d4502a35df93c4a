"""Where accuracy would end with more compute: a sigmoid for one curve, and the fits of a whole sweep."""
