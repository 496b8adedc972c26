"""Memory and capacity from config alone: what fits, how many sequences at which length, and what will not load and why.

Import from the modules (``alternatives.plan``, ``predict.predicted``, ``hardware.load``): a stage that needs the hardware file
alone must not depend on the whole planner.
"""
