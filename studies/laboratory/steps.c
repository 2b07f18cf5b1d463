/* Gradient steps of linear attention with the identity map, from moments of a client's examples; see clients.py.
   With width 4, rank 2 and two outputs: 10 pairs j <= k, 40 products of the kernel and the value weights. */

enum { WIDTH = 4, RANK = 2, OUTPUTS = 2, PAIRS = 10, PRODUCTS = 40, BLOCK = 8 };

static const int FIRST[PAIRS] = {0, 0, 0, 0, 1, 1, 1, 2, 2, 3};
static const int SECOND[PAIRS] = {0, 1, 2, 3, 1, 2, 3, 2, 3, 3};

/* matrix (client, 40, 40), vector (client, output, 40), rate (client); query, key, value are changed in place. */
void train(long clients, long steps, double ridge, const double *rate, const double *matrix, const double *vector,
           double *query, double *key, double *value)
{
    for (long client = 0; client < clients; client++) {
        const double *m = matrix + client * PRODUCTS * PRODUCTS, *b = vector + client * OUTPUTS * PRODUCTS;
        double *q = query + client * WIDTH * RANK, *k = key + client * WIDTH * RANK, *v = value + client * WIDTH * OUTPUTS;
        const double lr = rate[client];
        for (long step = 0; step < steps; step++) {
            double a[WIDTH][WIDTH], grad[OUTPUTS][PRODUCTS], product[OUTPUTS][PRODUCTS];
            double by_kernel[WIDTH][WIDTH] = {{0}}, by_value[WIDTH][OUTPUTS];
            for (int i = 0; i < WIDTH; i++)
                for (int j = 0; j < WIDTH; j++) {
                    a[i][j] = 0;
                    for (int r = 0; r < RANK; r++) a[i][j] += q[i * RANK + r] * k[j * RANK + r];
                }
            for (int o = 0; o < OUTPUTS; o++) {
                for (int i = 0; i < WIDTH; i++)
                    for (int s = 0; s < PAIRS; s++) {
                        const int j = FIRST[s], l = SECOND[s];
                        double both = a[i][j] * v[l * OUTPUTS + o];
                        if (j != l) both += a[i][l] * v[j * OUTPUTS + o];
                        product[o][i * PAIRS + s] = both;
                    }
            }
            for (int start = 0; start < PRODUCTS; start += BLOCK) { /* a block of sums stays in registers */
                double one[BLOCK] = {0}, two[BLOCK] = {0};
                for (int row = 0; row < PRODUCTS; row++) { /* the matrix is symmetric: its rows are its columns */
                    const double *line = m + row * PRODUCTS + start;
                    for (int c = 0; c < BLOCK; c++) {
                        one[c] += line[c] * product[0][row];
                        two[c] += line[c] * product[1][row];
                    }
                }
                for (int c = 0; c < BLOCK; c++) {
                    grad[0][start + c] = one[c] - b[start + c];
                    grad[1][start + c] = two[c] - b[PRODUCTS + start + c];
                }
            }
            for (int j = 0; j < WIDTH; j++)
                for (int o = 0; o < OUTPUTS; o++) by_value[j][o] = ridge * v[j * OUTPUTS + o];
            for (int o = 0; o < OUTPUTS; o++)
                for (int i = 0; i < WIDTH; i++)
                    for (int s = 0; s < PAIRS; s++) {
                        const int j = FIRST[s], l = SECOND[s];
                        const double g = grad[o][i * PAIRS + s];
                        by_kernel[i][j] += g * v[l * OUTPUTS + o];
                        by_value[l][o] += g * a[i][j];
                        if (j != l) {
                            by_kernel[i][l] += g * v[j * OUTPUTS + o];
                            by_value[j][o] += g * a[i][l];
                        }
                    }
            double by_query[WIDTH * RANK] = {0}, by_key[WIDTH * RANK] = {0};
            for (int i = 0; i < WIDTH; i++)
                for (int j = 0; j < WIDTH; j++)
                    for (int r = 0; r < RANK; r++) {
                        by_query[i * RANK + r] += by_kernel[i][j] * k[j * RANK + r];
                        by_key[j * RANK + r] += by_kernel[i][j] * q[i * RANK + r];
                    }
            for (int e = 0; e < WIDTH * RANK; e++) {
                q[e] -= lr * by_query[e];
                k[e] -= lr * by_key[e];
            }
            for (int e = 0; e < WIDTH * OUTPUTS; e++) v[e] -= lr * by_value[e / OUTPUTS][e % OUTPUTS];
        }
    }
}
