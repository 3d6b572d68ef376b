#!/bin/sh
# PrologSlurmctld of Slurm: hold a job whose model does not fit, before it starts.
# It reads the comment of the job, such as
#   sbatch --comment="fit /models/llama --batch 8 --ranks 16 --device-memory 80GiB"
# A comment with a colon is ignored, because MODULE:FUNCTION would run the user's code on the
# controller. Tested with stand-ins for tenure and scontrol, and not on a cluster.
set -f
case "$SLURM_JOB_COMMENT" in *:*) exit 0 ;; "fit "*) ;; *) exit 0 ;; esac
tenure $SLURM_JOB_COMMENT > /dev/null
[ $? -ne 1 ] || scontrol requeuehold "$SLURM_JOB_ID"
exit 0
