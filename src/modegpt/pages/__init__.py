"""What is looked at: the HTML page of a run, and the plots on it, in sweeps and in comparisons."""
