"""fastText classifiers: their files, the process that holds one for a node, runner and head."""
