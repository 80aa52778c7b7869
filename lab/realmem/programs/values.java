/**
 * A JVM's heap of 1600 MiB: a million values of 1 KiB in a hash table, collected by G1. A unit: 500,000 requests, whose
 * keys are as popular as Zipf's law says (exponent 1); 1 of 20 replaces its value by an equal one, which is new garbage.
 *
 * Before: `batch.rs` runs this file with `java`. After: this never returns; a line `unit SECONDS CHECKSUM` tells the end
 * of each unit.
 */

import java.util.Arrays;
import java.util.HashMap;
import java.util.Random;

class Values {
    static final int KEYS = 1_000_000;
    static final int REQUESTS = 500_000;
    static final HashMap<Integer, byte[]> values = new HashMap<>();

    static byte[] valueOf(int key) {
        byte[] value = new byte[1024];
        new Random(key).nextBytes(value);
        return value;
    }

    static int unit() {
        Random random = new Random(7);
        int checksum = 0;
        for (int request = 0; request < REQUESTS; request++) {
            int rank = (int) Math.pow(KEYS, random.nextDouble()) - 1;
            // Neighbours in rank are not neighbours in the heap.
            int key = (int) (rank * 7919L % KEYS);
            checksum = 31 * checksum + Arrays.hashCode(values.get(key));
            if (random.nextInt(20) == 0) {
                values.put(key, valueOf(key));
            }
        }
        return checksum;
    }

    public static void main(String[] args) {
        for (int key = 0; key < KEYS; key++) {
            values.put(key, valueOf(key));
        }
        while (true) {
            long start = System.nanoTime();
            int checksum = unit();
            System.out.printf("unit %.6f %08x%n", (System.nanoTime() - start) / 1e9, checksum);
        }
    }
}
