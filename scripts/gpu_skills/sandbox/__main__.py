from gpu_skills.sandbox.server import run

if __name__ == "__main__":
    run()
