"""Reports of what works with a model: backends, parallel sizes, engines, adapters, as the code of jobs decides it.

There is no list of what is supported, which could become wrong: a size is possible where the check that a job runs
raises no error, and the message of the error is the reason.
"""
