"""`verl-mg eval`: evaluation of a model or of a run on sets of prompts, and comparison of two evaluations.

target         MODEL, RUN or RUN@ITERATION of the command line
configuration  that of the run or of a file, reduced to what an evaluation needs
command        a `Job` without optimizers, which generates and scores the samples
results        files and table
comparison     paired test of two folders of results
"""
