"""`python -m ddp_trainer WORKLOAD`; apart from `main`, which the processes of --spawn could not import by this name."""

from ddp_trainer.main import end_process, main

if __name__ == "__main__":
    end_process(main())
