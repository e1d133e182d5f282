\set number random(1, 1000000)
INSERT INTO job (args) VALUES (jsonb_build_array(:number::int)) RETURNING id;
