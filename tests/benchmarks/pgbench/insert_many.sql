INSERT INTO job (args) SELECT jsonb_build_array(number) FROM generate_series(1, 1000) AS number;
