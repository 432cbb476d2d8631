"""Which documents hold which test items: an index of their n-grams, a mapper, and a job.

Read `words.py` first, which says what is compared, then `index.py` and `mapper.py`.
"""
