//! k-means, of points that the caller has: a pass assigns each to the nearest centre.
//!
//! Before: the caller has some points as first centres, and adds each point of a pass. After: the centres are the means
//! of the points that were nearest to them. Threads: the caller's. Units: points of N values.

/// Centres.
const CLUSTERS: usize = 8;

/// Centres, and the points of this pass so far.
pub struct Clusters<const N: usize> {
    centres: [[f32; N]; CLUSTERS],
    /// Sums and numbers of points.
    sums: [([f32; N], u32); CLUSTERS],
}

impl<const N: usize> Clusters<N> {
    /// These centres, and no points yet.
    pub fn new(centres: [[f32; N]; CLUSTERS]) -> Self {
        Self { centres, sums: [([0.0; N], 0); CLUSTERS] }
    }

    /// Assigns a point.
    pub fn add(&mut self, point: &[f32; N]) {
        let far =
            |centre: &[f32; N]| -> f32 { centre.iter().zip(point).map(|(one, other)| (one - other).powi(2)).sum() };
        let distances = self.centres.each_ref().map(far);
        let nearest = (0..CLUSTERS).min_by(|one, other| distances[*one].total_cmp(&distances[*other])).unwrap_or(0);
        let (sum, count) = &mut self.sums[nearest];
        sum.iter_mut().zip(point).for_each(|(sum, value)| *sum += value);
        *count += 1;
    }

    /// All points were added: moves the centres, and begins the next pass.
    pub fn end_pass(&mut self) {
        *self = Self::new(self.sums.map(|(sum, count)| sum.map(|sum| sum / count.max(1) as f32)));
    }
}
