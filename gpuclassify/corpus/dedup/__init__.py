"""Exact, fuzzy and semantic deduplication of frames; read `duplicates.py` first, then `exact.py`.

Documents get signatures, equal signatures make sets of candidates (`find_components` of each
class), and `groups.py` decides which document of a set stays.
"""
