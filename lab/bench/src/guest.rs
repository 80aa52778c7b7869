//! A guest in a helper process: a thread, a KVM virtual CPU or QEMU, which take the same orders.
//!
//! Before: `role` gives orders. After: `native`, `vcpu` or `qemu` has carried them out.
//! Threads: this one. Units: pages. Promise: an order that the kind of guest cannot carry out is an error;
//! [`Order::Touch`] touches only pages that are out, and every kind counts wrong bytes.

use anyhow::{Result, bail};

use crate::cpu;
use crate::native::Native;
use crate::order::{Answer, GuestConfig, GuestKind, Order};
use crate::pager::{enter, own_file};
use crate::qemu::Vmm;
use crate::vcpu::Vcpu;

enum Body {
    Empty,
    Native(Native),
    Vcpu(Vcpu),
    Qemu(Vmm),
}

/// A guest.
pub(crate) struct Guest {
    config: GuestConfig,
    body: Body,
}

impl Guest {
    pub(crate) fn new(config: GuestConfig) -> Result<Self> {
        if config.kind != GuestKind::Qemu {
            enter(&config.backing)?;
        }
        Ok(Self { config, body: Body::Empty })
    }

    pub(crate) fn obey(&mut self, order: Order) -> Result<Answer> {
        match (order, &mut self.body) {
            (Order::Fill, Body::Empty) => self.fill(),
            (Order::PageOut, Body::Native(native)) => native.page_out(self.config.pages).map(Answer::Out),
            (Order::Touch { seed, pace }, Body::Native(native)) => {
                let _stay = pace.pinned.then(cpu::Stay::here);
                native.touch(&self.config, seed, pace).map(Answer::Touched)
            }
            (Order::Storm, Body::Native(native)) => native.start_storm().map(|()| Answer::Done),
            (Order::Pause, Body::Native(native)) => native.pause(),
            (Order::Serve { hot, ms }, Body::Native(native)) => native.serve(hot, ms),
            (Order::Verify, Body::Native(native)) => native.verify(&self.config).map(|()| Answer::Done),
            (Order::PageOut, Body::Vcpu(vcpu)) => vcpu.page_out(self.config.pages).map(Answer::Out),
            (Order::Touch { .. }, Body::Vcpu(vcpu)) => vcpu.touch().map(Answer::Touched),
            (Order::Verify, Body::Vcpu(_)) => Ok(Answer::Done),
            (Order::Hold, Body::Qemu(vmm)) => vmm.hold().map(|()| Answer::Done),
            (Order::PageOut, Body::Qemu(vmm)) => vmm.page_out().map(Answer::Out),
            (Order::Touch { seed, .. }, Body::Qemu(vmm)) => vmm.touch(seed).map(Answer::Touched),
            (Order::Work { zipf, ms }, Body::Qemu(vmm)) => vmm.work(zipf, ms),
            (Order::Verify, Body::Qemu(vmm)) => vmm.verify().map(|()| Answer::Done),
            (order, _) => bail!("this guest cannot do {order:?} now"),
        }
    }

    fn fill(&mut self) -> Result<Answer> {
        let config = &self.config;
        match config.kind {
            GuestKind::Native => {}
            GuestKind::Kvm => {
                let vcpu = Vcpu::start(config)?;
                let ram = Some(own_file(vcpu.ram()));
                self.body = Body::Vcpu(vcpu);
                return Ok(Answer::Filled { ram, vmm: None });
            }
            GuestKind::Qemu => {
                let vmm = Vmm::start(config)?;
                let filled = Answer::Filled { ram: Some(vmm.ram().to_owned()), vmm: Some(vmm.pid()) };
                self.body = Body::Qemu(vmm);
                return Ok(filled);
            }
        }
        let native = Native::filled(config)?;
        let ram = native.file();
        self.body = Body::Native(native);
        Ok(Answer::Filled { ram, vmm: None })
    }
}
