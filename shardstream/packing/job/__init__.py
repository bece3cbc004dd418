"""Run a job: claim the folder, write its parts, publish the dataset."""
