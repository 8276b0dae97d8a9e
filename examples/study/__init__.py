"""The study: what each precision strategy does to training, measured on the CPU; see docs/development/study.md."""
