//! k-means of the caller's points: a pass assigns each point to the nearest centre.
//!
//! Before: the caller has some points as first centres, and adds each point of a pass. After: the centres are the means
//! of the points that were nearest to them. Threads: the caller's. Units: points of N whole numbers of up to 24 bits,
//! because an emulated CPU is much slower with fractions.

pub const CLUSTERS: usize = 8;

/// Centres, and the points of this pass so far.
pub struct Clusters<const N: usize> {
    centres: [[i32; N]; CLUSTERS],
    /// Sum and number of each centre's points.
    sums: [([i64; N], i64); CLUSTERS],
}

impl<const N: usize> Clusters<N> {
    pub fn new(centres: [[i32; N]; CLUSTERS]) -> Self {
        Self { centres, sums: [([0; N], 0); CLUSTERS] }
    }

    pub fn add(&mut self, point: &[i32; N]) {
        let far = |centre: &[i32; N]| -> i64 {
            let square = |(one, other): (&i32, &i32)| i64::from(one - other) * i64::from(one - other);
            centre.iter().zip(point).map(square).sum()
        };
        let distances = self.centres.each_ref().map(far);
        let nearest = (0..CLUSTERS).min_by_key(|at| distances[*at]).unwrap_or(0);
        let (sum, count) = &mut self.sums[nearest];
        sum.iter_mut().zip(point).for_each(|(sum, value)| *sum += i64::from(*value));
        *count += 1;
    }

    /// Ends a pass: moves the centres, and begins the next pass.
    pub fn end_pass(&mut self) {
        let mean = |sum: i64, count: i64| i32::try_from(sum / count.max(1)).unwrap_or(i32::MAX);
        *self = Self::new(self.sums.map(|(sum, count)| sum.map(|sum| mean(sum, count))));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pass_moves_the_centres_to_the_means_of_their_points() {
        let mut clusters = Clusters::new(std::array::from_fn(|at| [at as i32 * 100, 0]));
        [[-4, 8], [6, 0], [699, 1], [700, -1]].iter().for_each(|point| clusters.add(point));
        clusters.end_pass();
        assert_eq!((clusters.centres[0], clusters.centres[7]), ([1, 4], [699, 0]));
    }
}
