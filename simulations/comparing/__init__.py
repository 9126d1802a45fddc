"""Methods compared over seeds: tuned alike, run in worker processes, with statistics and a report.

It owns what is compared (`comparison`), one run of it (`cell`), the processes (`workers`), the
order of it all with the tuning (`compare`), the numbers (`statistics`) and what is written about
them (`report`, `pages`).
"""
