from bench.models.run import main

raise SystemExit(main())
