"""A plan as one web page that needs nothing else: no network, no server, no other file."""

from jdelta._report.page import page as page
