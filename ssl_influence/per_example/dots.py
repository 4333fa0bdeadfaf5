from ssl_influence.per_example.products import push_forward, row_dots, dots  # noqa
