//! Admission: all reservations together must fit the budget.
//!
//! Before: an operator changes a reservation. After: the change is made, or refused with the figures.
//! Units: bytes.

use ballast_base::Bytes;

use crate::settings::Class;
use crate::snapshot::Snapshot;
use crate::solve::sum;

/// Reserved memory, and the budget for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Admission {
    /// Sum of all reservations, and of the size of VMs that cannot be reclaimed.
    pub reserved_bytes: u64,
    /// Sum of all sizes.
    pub size_bytes: u64,
    /// DRAM that all VMs together may use.
    pub budget_bytes: u64,
    /// Guest memory that the stores can hold.
    pub far_capacity_bytes: u64,
}

impl Admission {
    /// Sums up a snapshot.
    pub fn of(snapshot: &Snapshot) -> Self {
        let reserved = snapshot.vms.iter().map(|vm| match vm.settings.class {
            Class::Pinned => vm.size_bytes,
            _ => vm.settings.effective_reservation(vm.most_bytes()),
        });
        Self {
            reserved_bytes: sum(reserved),
            size_bytes: sum(snapshot.vms.iter().map(|vm| vm.size_bytes)),
            budget_bytes: snapshot.host.budget_bytes,
            far_capacity_bytes: snapshot.host.far_capacity_bytes,
        }
    }

    /// Memory that may still be reserved.
    pub fn schedulable_bytes(&self) -> u64 {
        self.budget_bytes.saturating_sub(self.reserved_bytes)
    }

    /// The reason why the reservations cannot be kept, if they cannot.
    pub fn refusal(&self) -> Option<String> {
        (self.reserved_bytes > self.budget_bytes).then(|| {
            let (reserved, budget) = (Bytes(self.reserved_bytes), Bytes(self.budget_bytes));
            format!("all reservations together would be {reserved}, and the budget is {budget}")
        })
    }

    /// A warning if not all guests could use all of their memory.
    pub fn warning(&self) -> Option<String> {
        let room = self.budget_bytes.saturating_add(self.far_capacity_bytes);
        (self.size_bytes > room).then(|| {
            let (size, budget, far) =
                (Bytes(self.size_bytes), Bytes(self.budget_bytes), Bytes(self.far_capacity_bytes));
            format!("all VMs together have {size}; the budget of {budget} and the stores' {far} cannot hold that much")
        })
    }
}
